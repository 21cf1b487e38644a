// Curator's locks, told what to do line by line: VERB PATH [MILLIS], answered with yes or no.

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessLock;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.framework.recipes.locks.InterProcessReadWriteLock;
import org.apache.curator.retry.RetryOneTime;

public class Curator {
    public static void main(String[] args) throws Exception {
        CuratorFramework client =
            CuratorFrameworkFactory.newClient(args[0], 15000, 5000, new RetryOneTime(100));
        client.start();
        client.blockUntilConnected();
        Map<String, InterProcessLock> locks = new HashMap<>();
        System.out.println("ready");
        BufferedReader orders = new BufferedReader(new InputStreamReader(System.in));
        for (String line = orders.readLine(); line != null; line = orders.readLine()) {
            String[] words = line.split(" ");
            String path = "/" + words[1];
            if (words[0].equals("bench")) {
                InterProcessMutex lock = new InterProcessMutex(client, path);
                long end = System.nanoTime() + Long.parseLong(words[2]) * 1000000L;
                long count = 0;
                long begin = System.nanoTime();
                for (; System.nanoTime() < end; count++) {
                    lock.acquire();
                    lock.release();
                }
                System.out.println(count * 1e9 / (System.nanoTime() - begin));
                continue;
            }
            boolean done = true;
            if (words[0].equals("unlock")) {
                locks.remove(path).release();
            } else {
                InterProcessReadWriteLock both = new InterProcessReadWriteLock(client, path);
                InterProcessLock lock = words[0].equals("read") ? both.readLock()
                    : words[0].equals("write") ? both.writeLock()
                    : new InterProcessMutex(client, path);
                done = lock.acquire(Long.parseLong(words[2]), TimeUnit.MILLISECONDS);
                if (done) {
                    locks.put(path, lock);
                }
            }
            System.out.println(done ? "yes" : "no");
        }
    }
}
